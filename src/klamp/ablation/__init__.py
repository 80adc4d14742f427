"""Ablations: the same training in several variants (arms) and seeds, compared in a table and a picture.

plan        what to run: pure data, validated before anything starts
execute     the folder, the runs by an executor (`local`: processes on this machine; `cluster`: Ray), the results
one_run     one run: train, then `measure` against the model that training started from
outcome     the result of a run, as a file; `results`: the table and the picture of all of them
comparison  the same results of existing runs
"""
