"""What drafters may use of the model they draft for."""
