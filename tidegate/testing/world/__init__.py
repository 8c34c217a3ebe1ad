"""Virtual time, chance, and a disk that fails: what one seed decides."""
