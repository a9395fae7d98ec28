"""What `rolemesh doctor` tests on a machine: findings are functions of readings, which probes take."""
