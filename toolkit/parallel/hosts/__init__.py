"""Jobs of several processes: started, watched, met with each other, submitted to a cluster."""
