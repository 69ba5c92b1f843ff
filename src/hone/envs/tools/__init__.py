"""Tools that the policy calls: Python functions and servers of the Model Context Protocol."""
