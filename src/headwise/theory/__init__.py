"""What is known about heads and their widths, as plain float64 functions."""
