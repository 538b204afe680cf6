"""What every instrument is made of, and nothing of any subject: panel, controls, job, table."""
