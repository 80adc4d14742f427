"""Measurements: `python -m benchmarks NAME`. Each can be kept as a record under results/; timing decides no test."""
