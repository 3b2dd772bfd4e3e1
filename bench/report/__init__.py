"""Result files, limits of the hardware, and plots."""
