"""What a run would read of its data, before it starts: `hone data`."""
