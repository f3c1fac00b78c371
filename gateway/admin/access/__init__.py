"""Who may enter the control plane, and what each may do there."""
