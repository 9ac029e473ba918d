"""Groups, workers, futures and errors, whatever engine runs the workers. No Ray here."""
