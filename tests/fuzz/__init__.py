"""Seeded random graphs against the float64 reference."""
