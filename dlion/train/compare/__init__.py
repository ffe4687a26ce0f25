"""`dlion compare`: what is compared, the runs that show it, and the figures that come of it."""
