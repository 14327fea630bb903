//! Topic types: the kinds of event sources, and the event types of each.

use serde_json::{Value, json};

/// A kind of event source.
#[derive(Debug)]
pub struct TopicType {
    pub name: &'static str,
    pub provider: &'static str,
    pub display_name: &'static str,
    pub description: &'static str,
    /// Whether sources of this kind have no region.
    pub global: bool,
    /// Format of a source's resource id; none if the sources are Event Grid's own.
    pub source_format: Option<&'static str>,
    /// `AzureSubscription` for the only kind that has a scope.
    pub scope: Option<&'static str>,
    pub event_types: &'static [EventType],
}

#[derive(Debug)]
pub struct EventType {
    pub name: &'static str,
    pub display_name: &'static str,
    pub description: &'static str,
    /// Whether a subscription that names no event types gets this one.
    pub in_default_set: bool,
}

/// The topic type with this name, compared without case.
pub fn topic_type(name: &str) -> Option<&'static TopicType> {
    TOPIC_TYPES
        .iter()
        .find(|known| known.name.eq_ignore_ascii_case(name))
}

impl TopicType {
    fn id(&self) -> String {
        // Azure's ids of topic types have no leading slash.
        format!("providers/Microsoft.EventGrid/topicTypes/{}", self.name)
    }

    /// `locations` are display names.
    pub fn body(&self, locations: &[&str]) -> Value {
        let mut properties = json!({
            "provider": self.provider,
            "displayName": self.display_name,
            "description": self.description,
            "resourceRegionType": if self.global { "GlobalResource" } else { "RegionalResource" },
            "provisioningState": "Succeeded",
        });
        if !self.global {
            properties["supportedLocations"] = json!(locations);
        }
        if let Some(format) = self.source_format {
            properties["sourceResourceFormat"] = json!(format);
        }
        if let Some(scope) = self.scope {
            properties["supportedScopesForSource"] = json!([scope]);
        }
        json!({
            "id": self.id(),
            "name": self.name,
            "type": "Microsoft.EventGrid/topicTypes",
            "properties": properties,
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

/// The body of an event type of a topic type.
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

/// Event types that exist for resources of every kind.
const RESOURCE_EVENTS: &[EventType] = &[
    event(
        "Microsoft.Resources.ResourceWriteSuccess",
        "Resource Write Success",
        "Raised when a resource create or update operation succeeds.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceWriteFailure",
        "Resource Write Failure",
        "Raised when a resource create or update operation fails.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceWriteCancel",
        "Resource Write Cancel",
        "Raised when a resource create or update operation is cancelled.",
        true,
    ),
    event(
        "Microsoft.Resources.ResourceDeleteSuccess",
        "Resource Delete Success",
        "Raised when a resource deletion operation succeeds.",
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
        "Raised when a resource delete is cancelled. This happens when template deployment is cancelled.",
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
        "Raised when a resource action operation is cancelled.",
        true,
    ),
];

/// Event types that subscriptions of a resource group or of the whole Azure subscription get if
/// they name none.
pub const RESOURCE_EVENT_TYPES: &[&str] = &{
    let mut names = [""; RESOURCE_EVENTS.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = RESOURCE_EVENTS[at].name;
        at += 1;
    }
    names
};

/// In the order in which the service lists them.
pub const TOPIC_TYPES: &[TopicType] = &[
    TopicType {
        name: "Microsoft.Eventhub.Namespaces",
        provider: "Microsoft.Eventhub",
        display_name: "Event Hubs Namespaces",
        description: "Microsoft Event Hubs service events.",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.EventHub/namespaces/<namespaceName>",
        ),
        scope: None,
        event_types: &[event(
            "Microsoft.EventHub.CaptureFileCreated",
            "Capture File Created",
            "Raised when a capture file is created.",
            true,
        )],
    },
    TopicType {
        name: "Microsoft.Storage.StorageAccounts",
        provider: "Microsoft.Storage",
        display_name: "Storage Accounts (Blob & GPv2)",
        description: "Microsoft Storage service events.",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.Storage/storageAccounts/<storageAccountName>",
        ),
        scope: None,
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
        description: "Resource management events under an Azure subscription",
        global: true,
        source_format: Some("/subscriptions/<subscriptionId>"),
        scope: None,
        event_types: RESOURCE_EVENTS,
    },
    TopicType {
        name: "Microsoft.Resources.ResourceGroups",
        provider: "Microsoft.Resources",
        display_name: "Resource Groups",
        description: "Resource management events under a resource group.",
        global: true,
        source_format: Some("/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>"),
        scope: None,
        event_types: RESOURCE_EVENTS,
    },
    TopicType {
        name: "Microsoft.Devices.IoTHubs",
        provider: "Microsoft.Devices",
        display_name: "Azure IoT Hub Accounts",
        description: "Azure IoT Hub service events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.Devices/ioTHubs/<hubName>",
        ),
        scope: None,
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
        name: "Microsoft.EventGrid.Topics",
        provider: "Microsoft.EventGrid",
        display_name: "Event Grid Topics",
        description: "Custom events via Event Grid Topics",
        global: false,
        source_format: None,
        scope: None,
        event_types: &[],
    },
    TopicType {
        name: "Microsoft.ServiceBus.Namespaces",
        provider: "Microsoft.ServiceBus",
        display_name: "Service Bus Namespaces",
        description: "Service Bus events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.ServiceBus/namespaces/<namespaceName>",
        ),
        scope: None,
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
        name: "Microsoft.ContainerRegistry.Registries",
        provider: "Microsoft.ContainerRegistry",
        display_name: "Azure Container Registry",
        description: "Azure Container Registry service events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.ContainerRegistry/registries/<name>",
        ),
        scope: None,
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
        name: "Microsoft.Media.MediaServices",
        provider: "Microsoft.Media",
        display_name: "Microsoft Azure Media Services",
        description: "Microsoft Azure Media Services events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.Media/MediaServices/<name>",
        ),
        scope: None,
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
        name: "Microsoft.Maps.Accounts",
        provider: "Microsoft.Maps",
        display_name: "Azure Maps Accounts",
        description: "Microsoft Maps service events.",
        global: true,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.Maps/Accounts/<name>",
        ),
        scope: None,
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
        name: "Microsoft.EventGrid.Domains",
        provider: "Microsoft.EventGrid",
        display_name: "Event Grid Domains",
        description: "Custom events via Event Grid Domains.",
        global: false,
        source_format: None,
        scope: None,
        event_types: &[],
    },
    TopicType {
        name: "Microsoft.AppConfiguration.ConfigurationStores",
        provider: "Microsoft.AppConfiguration",
        display_name: "Microsoft Azure App Configuration",
        description: "Microsoft Azure App Configuration events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.AppConfiguration/ConfigurationStores/<name>",
        ),
        scope: None,
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
        name: "Microsoft.KeyVault.vaults",
        provider: "Microsoft.KeyVault",
        display_name: "Microsoft Key Vault",
        description: "Microsoft Key Vault service events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.KeyVault/vaults/<name>",
        ),
        scope: None,
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
        name: "Microsoft.Web.Sites",
        provider: "Microsoft.Web",
        display_name: "App Services",
        description: "App Services events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.Web/sites/<name>",
        ),
        scope: None,
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
        name: "Microsoft.Web.ServerFarms",
        provider: "Microsoft.Web",
        display_name: "App Service Plans",
        description: "App Service Plans events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.Web/ServerFarms/<name>",
        ),
        scope: None,
        event_types: &[event(
            "Microsoft.Web.AppServicePlanUpdated",
            "App Service Plan Updated",
            "Raised when an App Service plan is updated.",
            true,
        )],
    },
    TopicType {
        name: "Microsoft.SignalRService.SignalR",
        provider: "Microsoft.SignalRService",
        display_name: "Azure SignalR Service",
        description: "Azure SignalR service events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.SignalRService/SignalR/<name>",
        ),
        scope: None,
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
        name: "Microsoft.MachineLearningServices.Workspaces",
        provider: "Microsoft.MachineLearningServices",
        display_name: "Machine Learning Workspaces",
        description: "Microsoft Azure Machine Learning Service events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.MachineLearningServices/Workspaces/<name>",
        ),
        scope: None,
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
        name: "Microsoft.Cache.Redis",
        provider: "Microsoft.Cache",
        display_name: "Microsoft Azure Cache for Redis",
        description: "Microsoft Azure Cache for Redis service events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.Cache/Redis/<redisName>",
        ),
        scope: None,
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
        name: "Microsoft.Communication.CommunicationServices",
        provider: "Microsoft.Communication",
        display_name: "Azure Communication Services",
        description: "Azure Communication Service Events",
        global: true,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.Communication/communicationservices/<name>",
        ),
        scope: None,
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
        name: "Microsoft.PolicyInsights.PolicyStates",
        provider: "Microsoft.PolicyInsights",
        display_name: "Microsoft PolicyInsights",
        description: "Microsoft PolicyInsights service events",
        global: true,
        source_format: None,
        scope: Some("AzureSubscription"),
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
    TopicType {
        name: "Microsoft.AgFoodPlatform.FarmBeats",
        provider: "Microsoft.AgFoodPlatform",
        display_name: "Azure FarmBeats (Preview)",
        description: "Microsoft FarmBeats service events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.AgFoodPlatform/farmBeats/<name>",
        ),
        scope: None,
        event_types: &[
            event(
                "Microsoft.AgFoodPlatform.FarmChanged",
                "Farm Changed",
                "Raised when a farm is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.FarmerChanged",
                "Farmer Changed",
                "Raised when a farmer is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.SeasonalFieldChanged",
                "Seasonal Field Changed",
                "Raised when a seasonal field is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.BoundaryChanged",
                "Boundary Changed",
                "Raised when a boundary is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.FieldChanged",
                "Field Changed",
                "Raised when a field is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.CropChanged",
                "Crop Changed",
                "Raised when a crop is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.CropVarietyChanged",
                "Crop Variety Changed",
                "Raised when a crop variety is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.SeasonChanged",
                "Season Changed",
                "Raised when a season is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.ApplicationDataChanged",
                "Application Data Changed",
                "Raised when application data is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.HarvestingDataChanged",
                "Harvesting Data Changed",
                "Raised when harvesting data is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.TillageDataChanged",
                "Tillage Data Changed",
                "Raised when tillage data is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.PlantingDataChanged",
                "Planting Data Changed",
                "Raised when planting data is created, updated or deleted.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.SatelliteDataIngestionJobStatusChanged",
                "Satellite Data Ingestion Job Status Changed",
                "Raised when the status of a satellite data job changes.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.WeatherDataIngestionJobStatusChanged",
                "Weather Data Ingestion Job Status Changed",
                "Raised when the status of a weather data job changes.",
                true,
            ),
            event(
                "Microsoft.AgFoodPlatform.FarmOperationDataIngestionJobStatusChanged",
                "Farm Operation Data Ingestion Job Status Changed",
                "Raised when the status of a farm operation data job changes.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.ApiManagement.Service",
        provider: "Microsoft.ApiManagement",
        display_name: "Azure API Management Service",
        description: "Microsoft ApiManagement Service events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.ApiManagement/service/<name>",
        ),
        scope: None,
        event_types: &[
            event(
                "Microsoft.ApiManagement.UserCreated",
                "User Created",
                "Raised when a user is created.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.UserUpdated",
                "User Updated",
                "Raised when a user is updated.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.UserDeleted",
                "User Deleted",
                "Raised when a user is deleted.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.APICreated",
                "API Created",
                "Raised when an API is created.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.APIUpdated",
                "API Updated",
                "Raised when an API is updated.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.APIDeleted",
                "API Deleted",
                "Raised when an API is deleted.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.ProductCreated",
                "Product Created",
                "Raised when a product is created.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.ProductUpdated",
                "Product Updated",
                "Raised when a product is updated.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.ProductDeleted",
                "Product Deleted",
                "Raised when a product is deleted.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.APIReleaseCreated",
                "API Release Created",
                "Raised when an API release is created.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.APIReleaseUpdated",
                "API Release Updated",
                "Raised when an API release is updated.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.APIReleaseDeleted",
                "API Release Deleted",
                "Raised when an API release is deleted.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.SubscriptionCreated",
                "Subscription Created",
                "Raised when a subscription is created.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.SubscriptionUpdated",
                "Subscription Updated",
                "Raised when a subscription is updated.",
                true,
            ),
            event(
                "Microsoft.ApiManagement.SubscriptionDeleted",
                "Subscription Deleted",
                "Raised when a subscription is deleted.",
                true,
            ),
        ],
    },
    TopicType {
        name: "Microsoft.HealthcareApis.Workspaces",
        provider: "Microsoft.HealthcareApis",
        display_name: "Azure Health Data Services",
        description: "Azure Health Data Services events",
        global: false,
        source_format: Some(
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.HealthcareApis/workspaces/<name>",
        ),
        scope: None,
        event_types: &[
            event(
                "Microsoft.HealthcareApis.FhirResourceCreated",
                "Fhir Resource Created",
                "Raised when a FHIR resource is created.",
                true,
            ),
            event(
                "Microsoft.HealthcareApis.FhirResourceUpdated",
                "Fhir Resource Updated",
                "Raised when a FHIR resource is updated.",
                true,
            ),
            event(
                "Microsoft.HealthcareApis.FhirResourceDeleted",
                "Fhir Resource Deleted",
                "Raised when a FHIR resource is deleted.",
                true,
            ),
            event(
                "Microsoft.HealthcareApis.DicomImageCreated",
                "Dicom Image Created",
                "Raised when a DICOM image is created.",
                true,
            ),
            event(
                "Microsoft.HealthcareApis.DicomImageUpdated",
                "Dicom Image Updated",
                "Raised when a DICOM image is updated.",
                true,
            ),
            event(
                "Microsoft.HealthcareApis.DicomImageDeleted",
                "Dicom Image Deleted",
                "Raised when a DICOM image is deleted.",
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
        assert_eq!(TOPIC_TYPES.len(), 23, "as many as the service has");
        for more in [
            "Microsoft.Web.ServerFarms",
            "Microsoft.AgFoodPlatform.FarmBeats",
            "Microsoft.ApiManagement.Service",
            "Microsoft.HealthcareApis.Workspaces",
        ] {
            assert!(!topic_type(more).unwrap().event_types.is_empty(), "{more}");
        }
        for known in TOPIC_TYPES {
            let events: BTreeSet<_> = known.event_types.iter().map(|event| event.name).collect();
            assert_eq!(events.len(), known.event_types.len(), "{}", known.name);
        }
    }

    #[test]
    fn bodies() {
        let body = |name: &str| topic_type(name).unwrap().body(&["West US 2"]);
        let topics = body("Microsoft.EventGrid.Topics");
        assert_eq!(
            topics["id"],
            "providers/Microsoft.EventGrid/topicTypes/Microsoft.EventGrid.Topics"
        );
        let expected = json!({
            "provider": "Microsoft.EventGrid",
            "displayName": "Event Grid Topics",
            "description": "Custom events via Event Grid Topics",
            "resourceRegionType": "RegionalResource",
            "provisioningState": "Succeeded",
            "supportedLocations": ["West US 2"],
        });
        assert_eq!(topics["properties"], expected);
        let hubs = body("microsoft.eventhub.namespaces");
        assert_eq!(hubs["name"], "Microsoft.Eventhub.Namespaces");
        assert_eq!(
            hubs["properties"]["sourceResourceFormat"],
            "/subscriptions/<subscriptionId>/resourceGroups/<resourceGroupName>/providers/Microsoft.EventHub/namespaces/<namespaceName>"
        );
        let policies = body("Microsoft.PolicyInsights.PolicyStates");
        let expected = json!({
            "provider": "Microsoft.PolicyInsights",
            "displayName": "Microsoft PolicyInsights",
            "description": "Microsoft PolicyInsights service events",
            "resourceRegionType": "GlobalResource",
            "provisioningState": "Succeeded",
            "supportedScopesForSource": ["AzureSubscription"],
        });
        assert_eq!(policies["properties"], expected);
        let whole = body("Microsoft.Resources.Subscriptions");
        assert_eq!(
            whole["properties"]["sourceResourceFormat"],
            "/subscriptions/<subscriptionId>"
        );
        let storage = topic_type("Microsoft.Storage.StorageAccounts").unwrap();
        let event = &storage.event_type_bodies()[0];
        let id = "providers/Microsoft.EventGrid/topicTypes/Microsoft.Storage.StorageAccounts/eventTypes/Microsoft.Storage.BlobCreated";
        assert_eq!(event["id"], id);
        assert_eq!(event["properties"]["isInDefaultSet"], true);
    }
}
