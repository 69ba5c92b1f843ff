"""The APIs that the server speaks: requests are read and answers written, one file an API."""
