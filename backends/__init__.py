"""Engines that run models, one file each. Installed as `edgespec.backends`."""
