"""Measurements: `python -m benchmarks NAME`. Each run is a record under results/; timing decides no test."""
