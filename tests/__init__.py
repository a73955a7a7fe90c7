"""Tests of graphdnn, filed by what they need: unit, compile, sim, conformance, fuzz, cases, gpu."""
