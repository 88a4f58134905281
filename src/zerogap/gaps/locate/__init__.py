"""Where two ways of computing one model part: operation, layer, position, and how the difference grows from there."""
