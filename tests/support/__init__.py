"""What the tests share: helpers, fakes and programs that run in processes of their own."""
