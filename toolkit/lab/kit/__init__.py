"""What every instrument is made of, of no subject of its own: panel, plot, view, controls, job."""
