"""A whole transformer in numpy: what each engine must compute."""
