"""What a gradient becomes on the wire, and what its sender remembers."""
