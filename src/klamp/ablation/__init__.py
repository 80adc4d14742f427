"""Ablations: the same training in several variants (arms) and seeds, compared in a table and pictures.

plan      what to run: pure data, validated before anything starts
execute   all of it, in order: the folder, what is there already, the base model, the table and the pictures
executor  who runs it: `local` (processes on this machine) or `cluster` (Ray)
one_run   one run: train, then `measure` against the model that training started from
outcome   what a run came to, as a file and as columns of the table
"""
