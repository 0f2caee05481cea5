"""The written catalogue and grammar that shopping conversations' user turns are made from.

`catalogue/*.yaml` holds the product categories, `grammar/*.yaml` the sentences, `general/*.yaml` those about
other things; the modules beside them hold the code.

Every brand, product, review and order number is invented.
"""
