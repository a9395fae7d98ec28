"""What the devices at hand can do: measured in processes of their own, one for each device, all at once."""
