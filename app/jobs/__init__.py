"""Jobs: requests and what they resolve to, scheduling, leases, transitions, events, reports and erasure."""
