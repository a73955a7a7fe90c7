"""Every op, dtype and layout against the float64 reference, on every target."""
