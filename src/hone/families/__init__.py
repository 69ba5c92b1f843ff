"""Model families, a file each: all that hone knows of a family beside its weights. No torch."""
