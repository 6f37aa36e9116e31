"""Finished runs read back: accuracies, statistics, exports."""
