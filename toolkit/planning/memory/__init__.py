"""What one chip holds: by category (`categories.py`), and tensor by tensor (`sizes.py`)."""
