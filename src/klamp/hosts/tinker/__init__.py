"""The Tinker SDK: the KL loss, the reference, a training run, and a stand-in server to test against."""
