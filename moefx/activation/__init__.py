"""The activation between the two expert GEMMs: its named variants (`spec`) and how a graph region is recognised as one (`recognise`)."""
