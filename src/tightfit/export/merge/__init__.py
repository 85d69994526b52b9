"""An adapter into its base model, tensor by tensor."""
