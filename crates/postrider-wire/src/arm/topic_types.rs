//! The kinds of sources that events come from, and the events of each.

use serde_json::{Value, json};

/// A kind of source.
#[derive(Debug)]
pub struct TopicType {
    pub name: &'static str,
    pub provider: &'static str,
    pub display_name: &'static str,
    pub description: &'static str,
    /// Sources of this kind have no region.
    pub global: bool,
    /// The resource id of a source.
    pub source_format: &'static str,
    /// `Resource`, `ResourceGroup` or `AzureSubscription`.
    pub scope: &'static str,
    pub event_types: &'static [EventType],
}

#[derive(Debug)]
pub struct EventType {
    pub name: &'static str,
    pub display_name: &'static str,
    pub description: &'static str,
    /// A subscription that names no types gets it.
    pub in_default_set: bool,
}

/// The kind of this name, which compares without case.
pub fn topic_type(name: &str) -> Option<&'static TopicType> {
    TOPIC_TYPES
        .iter()
        .find(|known| known.name.eq_ignore_ascii_case(name))
}

impl TopicType {
    fn id(&self) -> String {
        // The service's own ids have no slash in front.
        format!("providers/Microsoft.EventGrid/topicTypes/{}", self.name)
    }

    pub fn body(&self, locations: &[&str]) -> Value {
        json!({
            "id": self.id(),
            "name": self.name,
            "type": "Microsoft.EventGrid/topicTypes",
            "properties": {
                "provider": self.provider,
                "displayName": self.display_name,
                "description": self.description,
                "resourceRegionType": if self.global { "GlobalResource" } else { "RegionalResource" },
                "provisioningState": "Succeeded",
                "supportedLocations": locations,
                "sourceResourceFormat": self.source_format,
                "supportedScopesForSource": [self.scope],
            },
        })
    }

    pub fn event_type_bodies(&self) -> Vec<Value> {
        self.event_types
            .iter()
            .map(|event| {
                event_type_body(
                    &self.id(),
                    event.name,
                    event.display_name,
                    event.description,
                    event.in_default_set,
                )
            })
            .collect()
    }
}

/// An event type of a topic type, whose id is given.
pub fn event_type_body(
    topic_type: &str,
    name: &str,
    display_name: &str,
    description: &str,
    in_default_set: bool,
) -> Value {
    json!({
        "id": format!("{topic_type}/eventTypes/{name}"),
        "name": name,
        "type": "Microsoft.EventGrid/topicTypes/eventTypes",
        "properties": {
            "displayName": display_name,
            "description": description,
            "schemaUrl": "tbd",
            "isInDefaultSet": in_default_set,
        },
    })
}

const fn event(
    name: &'static str,
    display_name: &'static str,
    description: &'static str,
    in_default_set: bool,
) -> EventType {
    EventType {
        name,
        display_name,
        description,
        in_default_set,
    }
}

/// What happens to any resource.
const RESOURCE_EVENTS: &[EventType] = &[
    event(
        "Microsoft.Resources.ResourceWriteSuccess",
        "Resource Write Success",
        "Raised when a resource write operation succeeds.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceWriteFailure",
        "Resource Write Failure",
        "Raised when a resource write operation fails.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceWriteCancel",
        "Resource Write Cancel",
        "Raised when a resource write operation is canceled.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceDeleteSuccess",
        "Resource Delete Success",
        "Raised when a resource delete operation succeeds.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceDeleteFailure",
        "Resource Delete Failure",
        "Raised when a resource delete operation fails.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceDeleteCancel",
        "Resource Delete Cancel",
        "Raised when a resource delete operation is canceled.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceActionSuccess",
        "Resource Action Success",
        "Raised when a resource action operation succeeds.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceActionFailure",
        "Resource Action Failure",
        "Raised when a resource action operation fails.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceActionCancel",
        "Resource Action Cancel",
        "Raised when a resource action operation is canceled.",
        true,
    ),
];

pub const TOPIC_TYPES: &[TopicType] = &[
    TopicType {
        name: "Microsoft.EventGrid.Topics",
        provider: "Microsoft.EventGrid",
        display_name: "Event Grid Topics",
        description: "Custom events via Event Grid Topics.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.EventGrid/topics/{topicName}",
        scope: "Resource",
        event_types: &[],
    },
    TopicType {
        name: "Microsoft.EventGrid.Domains",
        provider: "Microsoft.EventGrid",
        display_name: "Event Grid Domains",
        description: "Custom events via Event Grid Domains.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.EventGrid/domains/{domainName}",
        scope: "Resource",
        event_types: &[],
    },
    TopicType {
        name: "Microsoft.Storage.StorageAccounts",
        provider: "Microsoft.Storage",
        display_name: "Storage Accounts",
        description: "Microsoft Storage service events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.Storage/storageAccounts/{storageAccountName}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.Storage.BlobCreated",
                "Blob Created",
                "Raised when a blob is created.",
                true,
            ),
            event(
                "Microsoft.Storage.BlobDeleted",
                "Blob Deleted",
                "Raised when a blob is deleted.",
                true,
            ),
            event(
                "Microsoft.Storage.BlobRenamed",
                "Blob Renamed",
                "Raised when a blob is renamed.",
                false,
            ),
            event(
                "Microsoft.Storage.DirectoryCreated",
                "Directory Created",
                "Raised when a directory is created.",
                false,
            ),
            event(
                "Microsoft.Storage.DirectoryDeleted",
                "Directory Deleted",
                "Raised when a directory is deleted.",
                false,
            ),
            event(
                "Microsoft.Storage.DirectoryRenamed",
                "Directory Renamed",
                "Raised when a directory is renamed.",
                false,
            ),
            event(
                "Microsoft.Storage.BlobTierChanged",
                "Blob Tier Changed",
                "Raised when a blob's tier is changed.",
                false,
            ),
            event(
                "Microsoft.Storage.AsyncOperationInitiated",
                "Async Operation Initiated",
                "Raised when an asynchronous operation is initiated.",
                false,
            ),
            event(
                "Microsoft.Storage.BlobInventoryPolicyCompleted",
                "Blob Inventory Completed",
                "Raised when a blob inventory run is completed.",
                false,
            ),
            event(
                "Microsoft.Storage.LifecyclePolicyCompleted",
                "Lifecycle Policy Completed",
                "Raised when the actions of a lifecycle policy are performed.",
                false,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.Resources.Subscriptions",
        provider: "Microsoft.Resources",
        display_name: "Azure Subscriptions",
        description: "Resource management events under an Azure subscription.",
        global: true,
        source_format: "/subscriptions/{subscription}",
        scope: "AzureSubscription",
        event_types: RESOURCE_EVENTS,
    },
    TopicType {
        name: "Microsoft.Resources.ResourceGroups",
        provider: "Microsoft.Resources",
        display_name: "Resource Groups",
        description: "Resource management events under a resource group.",
        global: true,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}",
        scope: "ResourceGroup",
        event_types: RESOURCE_EVENTS,
    },
    TopicType {
        name: "Microsoft.EventHub.Namespaces",
        provider: "Microsoft.EventHub",
        display_name: "Event Hubs Namespaces",
        description: "Microsoft Event Hubs service events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.EventHub/namespaces/{namespaceName}",
        scope: "Resource",
        event_types: &[event(
            "Microsoft.EventHub.CaptureFileCreated",
            "Capture File Created",
            "Raised when a capture file is created.",
            true,
        )],
    },
    TopicType {
        name: "Microsoft.ServiceBus.Namespaces",
        provider: "Microsoft.ServiceBus",
        display_name: "Service Bus Namespaces",
        description: "Microsoft Service Bus events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.ServiceBus/namespaces/{namespaceName}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.ServiceBus.ActiveMessagesAvailableWithNoListeners",
                "Active Messages Available With No Listener",
                "Raised when there are active messages and no listener.",
                true,
            ),
            event(
                "Microsoft.ServiceBus.DeadletterMessagesAvailableWithNoListeners",
                "Deadletter Messages Available With No Listener",
                "Raised when there are dead-lettered messages and no listener.",
                true,
            ),
            event(
                "Microsoft.ServiceBus.ActiveMessagesAvailablePeriodicNotifications",
                "Active Messages Available Periodic Notifications",
                "Raised periodically while there are active messages.",
                true,
            ),
            event(
                "Microsoft.ServiceBus.DeadletterMessagesAvailablePeriodicNotifications",
                "Deadletter Messages Available Periodic Notifications",
                "Raised periodically while there are dead-lettered messages.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.Devices.IoTHubs",
        provider: "Microsoft.Devices",
        display_name: "Azure IoT Hub Accounts",
        description: "Azure IoT Hub service events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.Devices/IotHubs/{iotHubName}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.Devices.DeviceCreated",
                "Device Created",
                "Raised when a device is registered.",
                true,
            ),
            event(
                "Microsoft.Devices.DeviceDeleted",
                "Device Deleted",
                "Raised when a device is deleted.",
                true,
            ),
            event(
                "Microsoft.Devices.DeviceConnected",
                "Device Connected",
                "Raised when a device connects.",
                true,
            ),
            event(
                "Microsoft.Devices.DeviceDisconnected",
                "Device Disconnected",
                "Raised when a device disconnects.",
                true,
            ),
            event(
                "Microsoft.Devices.DeviceTelemetry",
                "Device Telemetry",
                "Raised when a telemetry message is sent.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.ContainerRegistry.Registries",
        provider: "Microsoft.ContainerRegistry",
        display_name: "Container Registry",
        description: "Microsoft Container Registry service events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.ContainerRegistry/registries/{registryName}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.ContainerRegistry.ImagePushed",
                "Image Pushed",
                "Raised when an image is pushed.",
                true,
            ),
            event(
                "Microsoft.ContainerRegistry.ImageDeleted",
                "Image Deleted",
                "Raised when an image is deleted.",
                true,
            ),
            event(
                "Microsoft.ContainerRegistry.ChartPushed",
                "Chart Pushed",
                "Raised when a chart is pushed.",
                true,
            ),
            event(
                "Microsoft.ContainerRegistry.ChartDeleted",
                "Chart Deleted",
                "Raised when a chart is deleted.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.KeyVault.vaults",
        provider: "Microsoft.KeyVault",
        display_name: "Key Vault",
        description: "Microsoft Key Vault service events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.KeyVault/vaults/{vaultName}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.KeyVault.CertificateNewVersionCreated",
                "Certificate New Version Created",
                "Raised when a new version of a certificate is created.",
                true,
            ),
            event(
                "Microsoft.KeyVault.CertificateNearExpiry",
                "Certificate Near Expiry",
                "Raised when a certificate is about to expire.",
                true,
            ),
            event(
                "Microsoft.KeyVault.CertificateExpired",
                "Certificate Expired",
                "Raised when a certificate has expired.",
                true,
            ),
            event(
                "Microsoft.KeyVault.KeyNewVersionCreated",
                "Key New Version Created",
                "Raised when a new version of a key is created.",
                true,
            ),
            event(
                "Microsoft.KeyVault.KeyNearExpiry",
                "Key Near Expiry",
                "Raised when a key is about to expire.",
                true,
            ),
            event(
                "Microsoft.KeyVault.KeyExpired",
                "Key Expired",
                "Raised when a key has expired.",
                true,
            ),
            event(
                "Microsoft.KeyVault.SecretNewVersionCreated",
                "Secret New Version Created",
                "Raised when a new version of a secret is created.",
                true,
            ),
            event(
                "Microsoft.KeyVault.SecretNearExpiry",
                "Secret Near Expiry",
                "Raised when a secret is about to expire.",
                true,
            ),
            event(
                "Microsoft.KeyVault.SecretExpired",
                "Secret Expired",
                "Raised when a secret has expired.",
                true,
            ),
            event(
                "Microsoft.KeyVault.VaultAccessPolicyChanged",
                "Vault Access Policy Changed",
                "Raised when an access policy of the vault is changed.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.SignalRService.SignalR",
        provider: "Microsoft.SignalRService",
        display_name: "Azure SignalR",
        description: "Microsoft Azure SignalR service events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.SignalRService/SignalR/{name}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.SignalRService.ClientConnectionConnected",
                "Client Connection Connected",
                "Raised when a client connects.",
                true,
            ),
            event(
                "Microsoft.SignalRService.ClientConnectionDisconnected",
                "Client Connection Disconnected",
                "Raised when a client disconnects.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.AppConfiguration.ConfigurationStores",
        provider: "Microsoft.AppConfiguration",
        display_name: "Azure App Configuration",
        description: "Azure App Configuration service events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.AppConfiguration/configurationStores/{storeName}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.AppConfiguration.KeyValueModified",
                "Key-Value Modified",
                "Raised when a key-value is created or replaced.",
                true,
            ),
            event(
                "Microsoft.AppConfiguration.KeyValueDeleted",
                "Key-Value Deleted",
                "Raised when a key-value is deleted.",
                true,
            ),
            event(
                "Microsoft.AppConfiguration.SnapshotCreated",
                "Snapshot Created",
                "Raised when a snapshot is created.",
                true,
            ),
            event(
                "Microsoft.AppConfiguration.SnapshotModified",
                "Snapshot Modified",
                "Raised when a snapshot is modified.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.Cache.Redis",
        provider: "Microsoft.Cache",
        display_name: "Azure Cache for Redis",
        description: "Azure Cache for Redis service events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.Cache/Redis/{name}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.Cache.PatchingCompleted",
                "Patching Completed",
                "Raised when the cache has been patched.",
                true,
            ),
            event(
                "Microsoft.Cache.ScalingCompleted",
                "Scaling Completed",
                "Raised when the cache has been scaled.",
                true,
            ),
            event(
                "Microsoft.Cache.ExportRDBCompleted",
                "Export RDB Completed",
                "Raised when an export of the cache has been completed.",
                true,
            ),
            event(
                "Microsoft.Cache.ImportRDBCompleted",
                "Import RDB Completed",
                "Raised when an import into the cache has been completed.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.Maps.Accounts",
        provider: "Microsoft.Maps",
        display_name: "Azure Maps Accounts",
        description: "Azure Maps geofence events.",
        global: true,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.Maps/accounts/{accountName}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.Maps.GeofenceEntered",
                "Geofence Entered",
                "Raised when coordinates have moved into a geofence.",
                true,
            ),
            event(
                "Microsoft.Maps.GeofenceExited",
                "Geofence Exited",
                "Raised when coordinates have moved out of a geofence.",
                true,
            ),
            event(
                "Microsoft.Maps.GeofenceResult",
                "Geofence Result",
                "Raised whenever a geofencing query has a result.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.MachineLearningServices.Workspaces",
        provider: "Microsoft.MachineLearningServices",
        display_name: "Machine Learning",
        description: "Azure Machine Learning service events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.MachineLearningServices/workspaces/{workspaceName}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.MachineLearningServices.ModelRegistered",
                "Model Registered",
                "Raised when a model is registered.",
                true,
            ),
            event(
                "Microsoft.MachineLearningServices.ModelDeployed",
                "Model Deployed",
                "Raised when a model is deployed.",
                true,
            ),
            event(
                "Microsoft.MachineLearningServices.RunCompleted",
                "Run Completed",
                "Raised when a run is completed.",
                true,
            ),
            event(
                "Microsoft.MachineLearningServices.DatasetDriftDetected",
                "Dataset Drift Detected",
                "Raised when a drift of a dataset is detected.",
                true,
            ),
            event(
                "Microsoft.MachineLearningServices.RunStatusChanged",
                "Run Status Changed",
                "Raised when the status of a run changes.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.Web.Sites",
        provider: "Microsoft.Web",
        display_name: "Azure Web App Service",
        description: "Azure Web App service events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.Web/sites/{siteName}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.Web.AppUpdated",
                "App Updated",
                "Raised when an app's configuration or lifecycle changes.",
                true,
            ),
            event(
                "Microsoft.Web.BackupOperationStarted",
                "Backup Operation Started",
                "Raised when a backup is started.",
                true,
            ),
            event(
                "Microsoft.Web.BackupOperationCompleted",
                "Backup Operation Completed",
                "Raised when a backup is completed.",
                true,
            ),
            event(
                "Microsoft.Web.BackupOperationFailed",
                "Backup Operation Failed",
                "Raised when a backup has failed.",
                true,
            ),
            event(
                "Microsoft.Web.RestoreOperationStarted",
                "Restore Operation Started",
                "Raised when a restore is started.",
                true,
            ),
            event(
                "Microsoft.Web.RestoreOperationCompleted",
                "Restore Operation Completed",
                "Raised when a restore is completed.",
                true,
            ),
            event(
                "Microsoft.Web.RestoreOperationFailed",
                "Restore Operation Failed",
                "Raised when a restore has failed.",
                true,
            ),
            event(
                "Microsoft.Web.SlotSwapStarted",
                "Slot Swap Started",
                "Raised when a slot swap is started.",
                true,
            ),
            event(
                "Microsoft.Web.SlotSwapCompleted",
                "Slot Swap Completed",
                "Raised when a slot swap is completed.",
                true,
            ),
            event(
                "Microsoft.Web.SlotSwapFailed",
                "Slot Swap Failed",
                "Raised when a slot swap has failed.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.Communication.CommunicationServices",
        provider: "Microsoft.Communication",
        display_name: "Azure Communication Services",
        description: "Azure Communication Services events.",
        global: true,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.Communication/communicationServices/{name}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.Communication.SMSReceived",
                "SMS Received",
                "Raised when a text message is received.",
                true,
            ),
            event(
                "Microsoft.Communication.SMSDeliveryReportReceived",
                "SMS Delivery Report Received",
                "Raised when a delivery report of a text message is received.",
                true,
            ),
            event(
                "Microsoft.Communication.ChatMessageReceived",
                "Chat Message Received",
                "Raised when a chat message is received.",
                true,
            ),
            event(
                "Microsoft.Communication.EmailDeliveryReportReceived",
                "Email Delivery Report Received",
                "Raised when a delivery report of an email is received.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.Media.MediaServices",
        provider: "Microsoft.Media",
        display_name: "Azure Media Services",
        description: "Microsoft Azure Media Services events.",
        global: false,
        source_format: "/subscriptions/{subscription}/resourceGroups/{resourceGroup}/providers/Microsoft.Media/mediaservices/{name}",
        scope: "Resource",
        event_types: &[
            event(
                "Microsoft.Media.JobStateChange",
                "Job State Change",
                "Raised when the state of a job changes.",
                true,
            ),
            event(
                "Microsoft.Media.JobFinished",
                "Job Finished",
                "Raised when a job is finished.",
                true,
            ),
            event(
                "Microsoft.Media.JobErrored",
                "Job Errored",
                "Raised when a job has failed.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.PolicyInsights.PolicyStates",
        provider: "Microsoft.PolicyInsights",
        display_name: "Microsoft PolicyInsights",
        description: "Policy state events of an Azure subscription.",
        global: true,
        source_format: "/subscriptions/{subscription}",
        scope: "AzureSubscription",
        event_types: &[
            event(
                "Microsoft.PolicyInsights.PolicyStateCreated",
                "Policy State Created",
                "Raised when a policy compliance state is created.",
                true,
            ),
            event(
                "Microsoft.PolicyInsights.PolicyStateChanged",
                "Policy State Changed",
                "Raised when a policy compliance state changes.",
                true,
            ),
            event(
                "Microsoft.PolicyInsights.PolicyStateDeleted",
                "Policy State Deleted",
                "Raised when a policy compliance state is deleted.",
                true,
            ),
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_found_in_any_case() {
        let names: BTreeSet<_> = TOPIC_TYPES.iter().map(|t| t.name.to_lowercase()).collect();
        assert_eq!(names.len(), TOPIC_TYPES.len());
        let storage = topic_type("microsoft.storage.storageaccounts").unwrap();
        let in_default_set = storage.event_types.iter().filter(|event| event.in_default_set);
        let in_default_set: Vec<_> = in_default_set.map(|event| event.name).collect();
        assert_eq!(
            in_default_set,
            ["Microsoft.Storage.BlobCreated", "Microsoft.Storage.BlobDeleted"]
        );
        assert!(topic_type("Microsoft.EventGrid.Nothing").is_none());
        for known in TOPIC_TYPES {
            let events: BTreeSet<_> = known.event_types.iter().map(|event| event.name).collect();
            assert_eq!(events.len(), known.event_types.len(), "{}", known.name);
        }
    }

    #[test]
    fn bodies() {
        let body = topic_type("Microsoft.EventGrid.Topics")
            .unwrap()
            .body(&["westus2"]);
        assert_eq!(
            body["id"],
            "providers/Microsoft.EventGrid/topicTypes/Microsoft.EventGrid.Topics"
        );
        assert_eq!(body["properties"]["resourceRegionType"], "RegionalResource");
        let storage = topic_type("Microsoft.Storage.StorageAccounts").unwrap();
        let event = &storage.event_type_bodies()[0];
        let id = "providers/Microsoft.EventGrid/topicTypes/Microsoft.Storage.StorageAccounts/eventTypes/Microsoft.Storage.BlobCreated";
        assert_eq!(event["id"], id);
        assert_eq!(event["properties"]["isInDefaultSet"], true);
    }
}
