"""Ablations: the same training in several variants (arms) and seeds, compared in a table and a picture.

plan      what to run: pure data, validated before anything starts; the runs that exist already
execute   the folder, the runs by an executor (processes on this machine; `cluster`: Ray), the comparison of runs
one_run   one run: train, then `measure` against the model that training started from
results   the outcome of a run, as a file; the table and the picture of all of them
"""
