"""What is wrong with a run: its metrics, its history, the alarms, and readers of every log; no torch."""
