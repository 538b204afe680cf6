"""The parts of every instrument: panel, plot, view, controls, job, scene and its player."""
