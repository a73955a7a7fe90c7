"""Inputs that broke other products: one test per case."""
