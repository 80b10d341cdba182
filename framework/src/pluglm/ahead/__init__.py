"""The next step planned while a device computes this one. Knows the kernel's seams for it, which do without it."""
