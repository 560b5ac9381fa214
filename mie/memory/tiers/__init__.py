"""Keep blocks outside the device."""
