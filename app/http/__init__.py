"""What every route shares: schemas, pagination, limits, errors and streaming bodies."""
