"""What makes a dependency image: builders of Dockerfiles, whichever is there."""
