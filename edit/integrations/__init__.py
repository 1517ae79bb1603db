"""Ready-made callbacks for training frameworks; each module needs its framework installed and is imported on its own."""
