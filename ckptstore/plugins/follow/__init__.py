"""Follow the commits of a run, in place: `Store.follow` and `ckptstore follow`."""
