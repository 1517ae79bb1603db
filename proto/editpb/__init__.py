"""The wire: generated stubs and the converters that validate everything."""
