"""What one byte sees, says, changes and costs after each loop of a small trained model."""
