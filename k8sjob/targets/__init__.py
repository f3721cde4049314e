"""What a job spec becomes in a cluster: one package for each kind of job, behind one Protocol."""
