"""The theory of heads and their widths, as plain float64 functions."""
