"""Every recorded time beside the model of other chips."""
