from penstock.client.api import client_transport as client_transport
from penstock.client.api import connect as connect
from penstock.client.api import open as open  # noqa: A004
from penstock.client.attaching import AttachResult as AttachResult
from penstock.client.column_lease import ColumnLease as ColumnLease
from penstock.client.column_lease import LeaseRequest as LeaseRequest
from penstock.client.embedded import open_settings as open_settings
from penstock.client.embedded import plane_transport as plane_transport
from penstock.client.encoded_group import EncodedGroup as EncodedGroup
from penstock.client.feeding import Fed as Fed
from penstock.client.feeding import feed as feed
from penstock.client.group_states import GroupState as GroupState
from penstock.client.handles import Handle as Handle
from penstock.client.handles import usable_url as usable_url
from penstock.client.plane import Plane as Plane
from penstock.client.source import Source as Source
from penstock.client.source import Step as Step
