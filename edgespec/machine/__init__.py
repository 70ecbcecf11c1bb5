"""Memory, disk and what was measured of this computer."""
