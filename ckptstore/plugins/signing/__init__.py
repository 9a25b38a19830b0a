"""Who stands behind a commit: signatures of commit ids."""
