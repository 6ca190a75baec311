# SPDX-License-Identifier: Apache-2.0
"""detjax behind the interfaces of other projects; each module needs an extra of its own."""
