"""`vargen.enable`: a model or pipeline that the user already has generates images by methods of vargen, where it is."""
